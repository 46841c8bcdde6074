"""From measurements to figures, pictures and a recommendation."""
