"""One operator a step: each decides, submits and defers."""
