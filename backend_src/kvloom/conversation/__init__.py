"""Conversations: their turns, what they keep between two turns, and their journal."""
