//! Resolves the devices of the hands, and how many hands and replicas there are.

use std::path::PathBuf;

use anyhow::{Result, bail};
use forebay_machine::Processors;
use forebay_sim::Profile;
use serde::Serialize;

use crate::affinity::Affinity;
use crate::flags::{Arrangement, Device, ServeFlags, SimFlags};
use crate::gpus::Gpus;

const SIM_PROFILE: &str = "instant";
/// The default mean length of simulated answers, roughly that of a chat answer.
const SIM_OUTPUT_TOKENS: u32 = 256;

/// The devices that compute the model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DeviceSettings {
    /// The kind of device, never `auto`. A hand's configuration contains its name too.
    #[serde(skip)]
    pub(crate) device: Device,
    #[serde(flatten)]
    pub(crate) arrangement: Arrangement,
    /// True if the hands are on other machines.
    #[serde(skip)]
    pub(crate) apart: bool,
    /// The GPU of each rank, as `CUDA_VISIBLE_DEVICES` names it; empty on other devices.
    pub(crate) gpus: Vec<String>,
    pub(crate) cpu_affinity: Affinity,
    /// The simulation, with the profile's times; `None`: a real device.
    pub(crate) simulated: Option<Simulated>,
    /// The simulation of each rank group.
    #[serde(skip)]
    pub(crate) simulated_groups: Vec<Simulated>,
}

/// The simulation that replaces a device.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Simulated {
    pub(crate) profile: String,
    #[serde(flatten)]
    pub(crate) content: Profile,
    pub(crate) output_tokens: u32,
    pub(crate) tokens_a_row: u32,
    pub(crate) script: Option<PathBuf>,
}

impl Simulated {
    /// Returns the simulation of each replica. Replicas of a step group have equal simulations.
    fn resolve(flags: &SimFlags, replicas: u32) -> Result<Vec<Self>> {
        let output_tokens = flags.sim_output_tokens.unwrap_or(SIM_OUTPUT_TOKENS);
        let tokens_a_row = flags.sim_tokens_a_row.unwrap_or(1);
        let names: Vec<&str> = match flags.sim_profile.as_slice() {
            [] => vec![SIM_PROFILE; replicas as usize],
            [one] => vec![one; replicas as usize],
            many if many.len() == replicas as usize => many.iter().map(String::as_str).collect(),
            many => bail!("--sim-profile: {} profiles for {replicas} replicas", many.len()),
        };
        let simulated = names.into_iter().map(|name| {
            let content = Profile::find(name)?;
            let profile = content.name.clone();
            let script = flags.sim_script.clone();
            Ok(Self { profile, content, output_tokens, tokens_a_row, script })
        });
        simulated.collect()
    }
}

impl DeviceSettings {
    pub(super) fn new(flags: &ServeFlags, processors: &Processors) -> Result<Self> {
        let arrangement = flags.replicas.arrangement()?;
        let Arrangement { replicas, groups, ranks, .. } = arrangement;
        let apart = flags.replicas.elsewhere().is_some();
        let (device, gpus) = device(flags.run.device, groups, ranks, apart)?;
        let simulated_groups = match device {
            Device::Sim => Simulated::resolve(&flags.sim, groups)?,
            _ if flags.sim.given() => bail!("the --sim-... flags are for --device sim"),
            _ => Vec::new(),
        };
        if flags.run.record_steps.is_some() && replicas > 1 {
            bail!("--record-steps writes the steps of one replica: --dp-size must be 1");
        }
        let cpu_affinity = match &flags.replicas.cpu_affinity {
            Some(flag) => flag.resolve(processors, groups, ranks)?,
            None => Affinity::default(),
        };
        Ok(Self {
            device,
            arrangement,
            apart,
            gpus,
            cpu_affinity,
            simulated: simulated_groups.first().cloned(),
            simulated_groups,
        })
    }

    /// True if the device is a GPU.
    pub(crate) fn cuda(&self) -> bool {
        self.device == Device::Cuda
    }

    /// The device's name in a hand's configuration.
    pub(crate) fn name(&self) -> &'static str {
        match self.device {
            Device::Auto | Device::Cpu => "cpu",
            Device::Cuda => "cuda",
            Device::Sim => "sim",
            Device::Deferred => "deferred",
        }
    }
}

/// Returns the device that `auto` resolves to, and the GPU of each rank.
fn device(flag: Device, replicas: u32, ranks: u32, apart: bool) -> Result<(Device, Vec<String>)> {
    if apart {
        // Hands on other machines report their devices themselves.
        return Ok((if flag == Device::Auto { Device::Cpu } else { flag }, Vec::new()));
    }
    let gpus = Gpus::find();
    let device = match flag {
        Device::Auto if gpus.any() => Device::Cuda,
        Device::Auto => Device::Cpu,
        given => given,
    };
    let each = if device == Device::Cuda { gpus.each(replicas, ranks)? } else { Vec::new() };
    Ok((device, each))
}

/// Checks that hands on other machines support all requested features. If all hands run here, only
/// `--collective-interface` is refused.
///
/// # Errors
/// A message of one line for the user.
pub(super) fn check_elsewhere(flags: &ServeFlags, device: Device, host_tier: bool) -> Result<()> {
    let Some(flag) = flags.replicas.elsewhere() else {
        if flags.replicas.collective_interface.is_some() {
            bail!("--collective-interface is for ranks on other machines: --listen-hands");
        }
        return Ok(());
    };
    let without = [
        (device == Device::Sim, "--device sim: it has no hands"),
        (device == Device::Deferred, "--device deferred"),
        (host_tier, "a tier of host memory"),
        (flags.replicas.cpu_affinity.is_some(), "--cpu-affinity: it is of this machine"),
    ];
    match without.into_iter().find(|(given, _)| *given) {
        Some((_, what)) => bail!("{flag} does not go with {what}"),
        None => Ok(()),
    }
}
