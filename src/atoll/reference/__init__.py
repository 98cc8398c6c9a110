"""The reference trainer: models, data, baselines, and runs of real tensors that follow a tape."""
