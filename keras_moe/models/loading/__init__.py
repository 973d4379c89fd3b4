"""What `from_preset` builds: blueprints and what overrides them."""
