"""Measures planners of exploration: prompts' rewards, policies, and a bound."""
