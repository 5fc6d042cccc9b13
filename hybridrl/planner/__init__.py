"""What a run would do and cost on machines that are not here. Imports neither torch nor ray."""
