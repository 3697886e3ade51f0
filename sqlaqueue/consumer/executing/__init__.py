"""From a claimed job to the return of its handler."""
