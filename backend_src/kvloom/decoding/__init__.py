"""Turns logits into tokens: penalties, bans and sampling."""
