// Live updates, local times and keys. The pages work without it.
