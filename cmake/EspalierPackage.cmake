# The C interface for other projects: `cmake --install build --component development --prefix DIR` puts the torch-free core library,
# its headers and a CMake package into DIR. find_package(espalier) then has the target espalier::core.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

function(espalier_install_package)
  set(folder "${CMAKE_INSTALL_LIBDIR}/cmake/espalier")
  install(TARGETS espalier_core EXPORT espalier_targets COMPONENT development
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
  install(FILES espalier/binding/core_interface.h espalier/binding/kernel_interface.h
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/espalier/binding" COMPONENT development)
  install(EXPORT espalier_targets NAMESPACE espalier:: FILE espalier-targets.cmake DESTINATION "${folder}"
    COMPONENT development)
  set(version_file "${CMAKE_BINARY_DIR}/espalier-config-version.cmake")
  write_basic_package_version_file("${version_file}" VERSION "${PROJECT_VERSION}" COMPATIBILITY SameMinorVersion)
  install(FILES cmake/espalier-config.cmake "${version_file}" DESTINATION "${folder}" COMPONENT development)
endfunction()
