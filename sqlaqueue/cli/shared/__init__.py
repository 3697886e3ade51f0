"""What the commands share: targets, databases, options, output, errors."""
