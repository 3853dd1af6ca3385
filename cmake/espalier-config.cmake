# find_package(espalier): the target espalier::core, the C interface of the core library (prefix trees, plans, CPU kernels).
include("${CMAKE_CURRENT_LIST_DIR}/espalier-targets.cmake")
