"""The plan: records, files, timeline and referee. Needs the standard library and PyYAML only."""
