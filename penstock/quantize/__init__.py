"""Makes a quantised checkpoint of another one, a layer at a time."""
