"""Reports of a run: curves and transcripts in one self-contained file."""
