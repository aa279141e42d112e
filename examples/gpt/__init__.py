"""The GPT of the examples: model, training and cached decoding."""
