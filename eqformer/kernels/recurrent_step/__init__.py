"""One token's step of a recurrence, whose states are read and written where they are stored."""
