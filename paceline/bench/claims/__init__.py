"""The measurements behind what we promise of `auto`: never slower, quick to adapt, cheap by itself."""
