"""Turns prompts and chats into token ids, and token ids into text."""
