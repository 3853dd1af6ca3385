# What a wheel holds beside the Python package: the program and the core library in espalier/bin, and the two libraries that they
# link and a machine may lack. torch is the one beside the package, in the same site-packages; where it lies elsewhere
# python/espalier/launch.py names its folder.

function(espalier_install_for_wheel)
  set_target_properties(espalier_cli espalier_core PROPERTIES INSTALL_RPATH "$ORIGIN:$ORIGIN/../../torch/lib")
  install(TARGETS espalier_cli espalier_core RUNTIME_DEPENDENCY_SET espalier_wheel
    RUNTIME DESTINATION espalier/bin COMPONENT wheel LIBRARY DESTINATION espalier/bin COMPONENT wheel)
  install(RUNTIME_DEPENDENCY_SET espalier_wheel PRE_INCLUDE_REGEXES simdjson zstd PRE_EXCLUDE_REGEXES ".*"
    LIBRARY DESTINATION espalier/bin COMPONENT wheel)
  # python/espalier/launch.py refuses a torch of another minor version by this file.
  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/torch_version" CONTENT "${EspalierTorch_VERSION}\n")
  install(FILES "${CMAKE_BINARY_DIR}/torch_version" DESTINATION espalier/bin COMPONENT wheel)
  # The library behind --device cuda, where `make cuda` has built it; it finds torch and cuBLAS beside the package.
  install(PROGRAMS "${CMAKE_BINARY_DIR}/libespalier_cuda.so" DESTINATION espalier/bin COMPONENT wheel OPTIONAL)
endfunction()

# `make wheel`: a build folder that is finished is packed as it is, instead of building everything once more.
function(espalier_install_built folder)
  install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" --install \"${folder}\" --component wheel --strip
    --prefix \"\${CMAKE_INSTALL_PREFIX}\" COMMAND_ERROR_IS_FATAL ANY)" COMPONENT wheel)
  add_custom_target(espalier_cli)
  add_custom_target(espalier_core)
endfunction()
