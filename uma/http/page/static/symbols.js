/** LaTeX's names of letters, signs and functions. */

/** @param {string} text Names and signs in turns. @returns {Record<string, string>} */
function named(text) {
  const words = text.trim().split(/\s+/);
  return Object.fromEntries(words.flatMap((name, at) => (at % 2 ? [] : [[name, words[at + 1]]])));
}

export const LETTERS = named(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ
  nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ emptyset ∅ varnothing ∅ imath ı jmath ȷ wp ℘ top ⊤ bot ⊥
  R ℝ N ℕ Z ℤ Q ℚ C ℂ
`);

export const SYMBOLS = named(String.raw`
  pm ± mp ∓ times × div ÷ cdot · ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ cap ∩ cup ∪ wedge ∧
  land ∧ vee ∨ lor ∨ setminus ∖ neg ¬ lnot ¬ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ ne ≠ neq ≠ equiv ≡ approx ≈
  cong ≅ sim ∼ simeq ≃ propto ∝ ll ≪ gg ≫ lt < gt > in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇
  subsetneq ⊊ mid ∣ nmid ∤ parallel ∥ perp ⊥ models ⊨ vdash ⊢ prec ≺ succ ≻ preceq ⪯ succeq ⪰ asymp ≍ doteq ≐
  to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸
  iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ longmapsto ⟼ hookrightarrow ↪ uparrow ↑ downarrow ↓
  rightleftharpoons ⇌ nearrow ↗ searrow ↘ xrightarrow → gets ←
  sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂
  forall ∀ exists ∃ nexists ∄ therefore ∴ because ∵ angle ∠ triangle △ square □ blacksquare ■ qed ∎ degree °
  ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsb ⋯ dotsc … prime ′ colon : coloneqq ≔ langle ⟨ rangle ⟩ lfloor ⌊
  rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } lbrack [ rbrack ] vert | lvert | rvert | Vert ‖ lVert ‖ rVert ‖ backslash \
  dagger † ddagger ‡ checkmark ✓ ltimes ⋉ rtimes ⋊ amalg ⨿ bowtie ⋈ sqcup ⊔ sqcap ⊓ uplus ⊎ wr ≀ diamond ⋄
`);

/** Functions, written upright. */
export const OPERATORS = (
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp lim max min sup inf limsup liminf " +
  "argmax argmin det dim ker deg gcd hom arg Pr mod bmod tr rank"
).split(" ");
