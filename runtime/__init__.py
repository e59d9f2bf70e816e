"""Replays a plan inside the user's training script."""
