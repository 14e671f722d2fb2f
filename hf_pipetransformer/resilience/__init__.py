"""How processes begin and end together: the store that they meet in, and their exit."""
