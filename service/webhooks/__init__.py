"""Telling other systems what happens here: who wants to hear what, the outbox, and who carries it out."""
