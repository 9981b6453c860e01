"""Makes a quantized checkpoint of another one, a layer at a time."""
