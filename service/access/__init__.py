"""Who may do what: principals, tokens, rates, and the record of what they did. Knows nothing of jobs."""
