"""Modules, data and settings of train_mimo.py."""
