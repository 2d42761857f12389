"""Jobs that are stopped and go on, in five frameworks; each is one program, and docs/train/resume.md tells how to run it."""
