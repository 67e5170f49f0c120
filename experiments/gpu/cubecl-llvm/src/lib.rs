//! The names that cubecl-cuda 0.11 takes from cubecl-llvm, without LLVM behind them.
//!
//! With the feature `cpp` of cubecl-cuda kernels are generated as CUDA C++ and compiled by NVRTC, and nothing here is
//! ever called.

use cubecl_core::ir::DeviceProperties;
use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_server::compiler::CompilationError;
use cubecl_server::kernel::BufferIOAttr;

/// Code for NVIDIA's cards.
pub mod nvptx {
    /// Versions of PTX.
    pub mod ptx_version {
        use std::fmt;

        /// A version; there is none here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(u32);

        impl PtxVersion {
            /// The newest that a driver takes.
            pub fn for_driver(_: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "ptx{}", self.0)
            }
        }
    }
}

/// What targets have in common.
pub mod shared {
    /// What LLVM cannot express.
    pub mod lowered_features {
        use super::super::DeviceProperties;

        /// A kind of card.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA's.
            Nvptx,
        }

        /// Leaves a card what it has.
        pub fn restrict_features(_: &mut DeviceProperties, _: GpuTarget) {}
    }
}

/// What is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA's cards.
    Nvptx,
}

/// The compiler that is not here.
#[derive(Clone, Debug)]
pub struct PlironCompiler {
    /// What it would compile for.
    pub target: LlvmTarget,
}

/// How it would compile.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// Of a CPU.
    pub arch: Option<()>,
    /// Of a card.
    pub sm_arch: Option<SmArch>,
    /// Of the driver.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// Whether arguments lie in constant memory.
    pub grid_constants: bool,
    /// Room for `..Default::default()`.
    pub other: (),
}

/// A compiled kernel.
#[derive(Debug)]
pub struct NvptxModule {
    /// Its code.
    pub ptx: Vec<std::ffi::c_char>,
    /// Bytes that threads share.
    pub shared_memory_size: usize,
    /// As it was before.
    pub ir: String,
    /// How it uses its buffers.
    pub io: Vec<BufferIOAttr>,
}

/// What comes of compiling.
#[derive(Debug)]
pub enum PlironArtifact {
    /// For NVIDIA's cards.
    NvptxCode(NvptxModule),
    /// For others.
    Other,
}

impl PlironCompiler {
    /// Is never called where cubecl-cuda has the feature `cpp`.
    ///
    /// # Panics
    ///
    /// Always.
    pub fn compile(&mut self, _: KernelDefinition, _: &PlironOptions) -> Result<PlironArtifact, CompilationError> {
        panic!("this program was built without LLVM: enable the feature `cpp` of cubecl-cuda")
    }

    /// The name of its language.
    pub fn lang_tag(&self) -> &'static str {
        "none"
    }
}
