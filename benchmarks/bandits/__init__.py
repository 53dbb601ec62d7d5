"""What planners of exploration are measured on and with: prompts' rewards, policies, and a bound."""
