"""Model files, what a model is made of, its weights and what they take."""
