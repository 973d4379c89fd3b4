"""What every model of the zoo has: saving, copies, export, cards."""
