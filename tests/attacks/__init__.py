"""Files that were made to break a reader: kept as code that builds them, never as files that run."""
