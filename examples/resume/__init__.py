"""Jobs that are stopped and go on, in five frameworks, each one program: docs/train/frameworks.md."""
