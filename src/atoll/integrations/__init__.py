"""Atoll inside other trainers: transformers, accelerate, Lightning, torchtitan.

Each module needs its framework. No other package imports these modules at startup, so none of the frameworks is
required.
"""
