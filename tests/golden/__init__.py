"""Golden roots: roots and online stores of a format, as a version that wrote it left them, and what
they must answer in every version that reads it."""
