"""Feeds, comparison and proof."""
