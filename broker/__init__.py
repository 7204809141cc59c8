"""shell: the broker process and the client commands that speak to it."""
