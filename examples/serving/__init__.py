"""Generation, prompts and the HTTP endpoint of serve.py."""
