"""The models of this machine by their names: where they lie, what their headers say, how they come and go."""
