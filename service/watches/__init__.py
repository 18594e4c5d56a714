"""Watches: prefixes that are looked at regularly, whose new checkpoints become jobs. Knows nothing of HTTP."""
