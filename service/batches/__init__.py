"""Batches: many conversions in one request, by a list or by a pattern of folders. Knows nothing of HTTP."""
