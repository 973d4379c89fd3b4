"""Images and texts as models take them."""
