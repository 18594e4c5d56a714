"""Jobs: what they are, how they are stored and leased, and who carries them out. Knows nothing of HTTP."""
