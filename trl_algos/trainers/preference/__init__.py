"""What the trainers on preference pairs share."""
