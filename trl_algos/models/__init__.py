"""What a model's folder tells without loading it: whether it is one, and the memory that training it takes."""
