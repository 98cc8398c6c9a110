"""Atoll inside the trainers that people already use. Each module needs its framework; nothing else imports them."""
