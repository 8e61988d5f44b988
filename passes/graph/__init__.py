"""What passes see: collectives with their arguments, what ops do, what must come before what, whose sizes differ."""
