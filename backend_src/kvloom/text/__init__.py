"""Prompts and chats to token ids, ids to text."""
