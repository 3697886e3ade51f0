[tool.alembic]
script_location = "${script_location}"
prepend_sys_path = ["."]
