# FindEspalierTorch.cmake. Input: ESPALIER_TORCH_DIR (torch package folder) or ESPALIER_PYTHON; for a wheel the Python that builds it.
# Torch is not imported. An isolated build hides the packages of its Python by PYTHONPATH, which -E leaves out.
if(NOT ESPALIER_PYTHON AND SKBUILD)
  set(ESPALIER_PYTHON "${Python_EXECUTABLE}" CACHE FILEPATH "The Python whose torch is used")
endif()
if(NOT ESPALIER_PYTHON)
  find_program(ESPALIER_PYTHON NAMES python3 python)
endif()
if(NOT ESPALIER_TORCH_DIR)
  foreach(_ignoring "" -E)
    if(NOT _dir)
      execute_process(COMMAND "${ESPALIER_PYTHON}" ${_ignoring} -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
        OUTPUT_VARIABLE _dir ERROR_QUIET)
    endif()
  endforeach()
  set(ESPALIER_TORCH_DIR "${_dir}" CACHE PATH "Folder of the torch package" FORCE)
endif()
if(EXISTS "${ESPALIER_TORCH_DIR}/version.py")
  file(STRINGS "${ESPALIER_TORCH_DIR}/version.py" _v REGEX "^__version__ = ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+" EspalierTorch_VERSION "${_v}")  # the minor version: that is what a program is built for
endif()
find_file(EspalierTorch_C10 libc10.so PATHS "${ESPALIER_TORCH_DIR}/lib" NO_DEFAULT_PATH NO_CACHE)
find_file(EspalierTorch_CPU libtorch_cpu.so PATHS "${ESPALIER_TORCH_DIR}/lib" NO_DEFAULT_PATH NO_CACHE)
find_path(EspalierTorch_INCLUDE ATen/core/Tensor.h PATHS "${ESPALIER_TORCH_DIR}/include" NO_DEFAULT_PATH NO_CACHE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(EspalierTorch
  REQUIRED_VARS EspalierTorch_CPU EspalierTorch_C10 EspalierTorch_INCLUDE VERSION_VAR EspalierTorch_VERSION HANDLE_VERSION_RANGE)
if(EspalierTorch_FOUND AND NOT TARGET EspalierTorch::cpu)
  get_filename_component(_site "${ESPALIER_TORCH_DIR}" DIRECTORY)
  file(GLOB _libraries LIST_DIRECTORIES true "${_site}/nvidia/*/lib")  # their names differ between builds for CUDA 12 and 13
  foreach(_d ${_libraries})
    list(APPEND _rl "LINKER:-rpath-link,${_d}")   # what libtorch_cpu.so itself needs, at link time only
  endforeach()
  # The first folder takes the place of a header of ATen's (see there);
  # the third holds torch/types.h, which even c10d headers include (through logger.hpp, reducer.hpp, rpc)
  set(_inc "${CMAKE_CURRENT_LIST_DIR}/torch;${EspalierTorch_INCLUDE};${EspalierTorch_INCLUDE}/torch/csrc/api/include")
  add_library(EspalierTorch::c10 SHARED IMPORTED)
  set_target_properties(EspalierTorch::c10 PROPERTIES IMPORTED_LOCATION "${EspalierTorch_C10}"
    INTERFACE_INCLUDE_DIRECTORIES "${_inc}" INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_inc}")
  add_library(EspalierTorch::cpu SHARED IMPORTED)
  set_target_properties(EspalierTorch::cpu PROPERTIES IMPORTED_LOCATION "${EspalierTorch_CPU}"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO" INTERFACE_LINK_OPTIONS "${_rl}"
    INTERFACE_LINK_LIBRARIES EspalierTorch::c10)
endif()
