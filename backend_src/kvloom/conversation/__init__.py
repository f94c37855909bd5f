"""Conversations: their turns, the KV state that they keep between turns, and their journal."""
