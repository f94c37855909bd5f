"""Model files, model shapes, weights, the decoder and its memory."""
