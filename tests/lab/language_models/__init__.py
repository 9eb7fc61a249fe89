"""Small decoders with random weights, converted with a key and value cache as applications convert them."""
