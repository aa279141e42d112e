"""Policy and settings of train_rl.py."""
